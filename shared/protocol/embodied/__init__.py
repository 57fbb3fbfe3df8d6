"""Messages of embodied jobs: simulators, groups of episodes, films."""
