"""An unmodified module and a call of it -> one graph of functional ops. `trace` is the way in; the rest is what a graph must be told."""
