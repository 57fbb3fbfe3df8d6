"""OpenAI's fine-tuning API: conversion of its requests to jobs, and of jobs to its replies."""
