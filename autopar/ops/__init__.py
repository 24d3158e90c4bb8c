"""What graphs call beside torch's own ops: collectives, compressed gradients, random numbers by position, copies to the host."""
