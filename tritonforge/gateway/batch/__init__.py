"""Files of requests in the form of OpenAI's Batch API: read, answered, resumed."""
