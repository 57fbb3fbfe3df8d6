"""The env service: owns simulators and answers reset and step requests."""
