"""The filter stage: what is looked for in prompts and answers, and what is done about it."""
