"""What a user would run instead: other programs that decode the same prompts, each in a process of its own."""
