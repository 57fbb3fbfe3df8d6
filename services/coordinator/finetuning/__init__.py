"""Jobs in the shape of OpenAI's fine-tuning API: what they become, and what is shown of them."""
