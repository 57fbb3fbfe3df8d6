"""Section `online` of a job file: live episodes, feedback, promotion, and defences."""
