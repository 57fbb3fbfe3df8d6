"""Key `online` of a job file: live episodes, feedback, promotion and what protects them."""
