"""Messages of a chat on their way from OpenAI's form to the one that the tokenizer model takes. Pure."""

from typing import Any

Message = dict[str, Any]


def of_request(message: Message) -> Message:
    """A message as the tokenizer takes it: a developer's word is the system's, an assistant may have said nothing."""
    if message["role"] == "developer":
        return message | {"role": "system"}
    if message["role"] == "assistant":
        return {"content": None} | {key: value for key, value in message.items() if key != "annotations"}
    return message


def text_of(content: str | list[dict[str, str]]) -> str:
    """A message's text; its parts are joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def instruct(messages: list[Message], instruction: str) -> list[Message]:
    """The chat with `instruction` added to what the system says."""
    if messages and messages[0]["role"] == "system":
        said = f"{text_of(messages[0]['content'])}\n\n{instruction}"
        return [{"role": "system", "content": said}, *messages[1:]]
    return [{"role": "system", "content": instruction}, *messages]
