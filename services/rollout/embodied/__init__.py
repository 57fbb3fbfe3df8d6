"""Embodied jobs on a rollout worker. A ticket is a group of episodes from one reset id. Their simulators live in
sessions of env workers; each session is stepped by a loop of its own, so that one steps while the policy decides for
another. Lanes, one for each environment, take the next episode as soon as theirs ends."""
