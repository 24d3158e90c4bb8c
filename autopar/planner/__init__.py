"""From what a user asks to a plan that answers it: the request read, the shape of the mesh chosen, the plan explained and improved upon."""
