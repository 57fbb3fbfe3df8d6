"""Section `reward` of a job file: scorers, graders, and the formulas that combine them."""
