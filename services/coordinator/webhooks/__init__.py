"""Events of jobs, posted to addresses of users: signed, in order, at least once."""
