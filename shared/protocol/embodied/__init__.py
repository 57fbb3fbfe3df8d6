"""Messages of embodied jobs: simulators, groups of episodes, videos."""
