"""Where the model lives and how it is differentiated: one file per backend, behind one protocol."""
