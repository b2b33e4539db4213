"""A conversation as token ids: the official prompt and, after it, the reference answer as the network is to write it."""

from __future__ import annotations

import json
from typing import Any

from forebay.model.chat import ChatCodec
from forebay.model.demo.tasks.conversation import Conversation
from forebay.model.tokenizer import Tokenizer

GAP = "\0"  # stands for the marker id of calls

class Renderer:
    """Renders for one tokenizer. Holds no state of a conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.codec = ChatCodec(tokenizer)  # checks that the vocabulary has the tokens of the encoding
        self._tokenizer: Any = tokenizer

    def render(self, conversation: Conversation) -> tuple[list[int], tuple[int, int]]:
        """All ids, and the range of the answer in them: what follows the prompt, end of sentence included."""
        prompt = self.codec.encode(conversation.body).token_ids
        ids = prompt + self._answer(conversation.answer)
        return ids, (len(prompt), len(ids))

    def answers(self, ids: list[int]) -> list[tuple[int, int]]:
        """Ranges of every finished assistant turn in `ids`, each from what follows its header to its end of sentence."""
        t = self._tokenizer
        out: list[tuple[int, int]] = []
        at = 0
        while True:
            try:
                start = ids.index(t.assistant_id, at) + 2
                stop = ids.index(t.eos_id, start) + 1
            except ValueError:
                return out
            out.append((start, stop))
            at = stop

    def _answer(self, message: dict[str, Any]) -> list[int]:
        """Ids of a finished answer (spec/chat-encoding.md §5, `assistant_turn` after its header)."""
        t = self._tokenizer
        ids: list[int] = []
        if (reasoning := message.get("reasoning_content")) is not None:
            ids += [*t.encode(reasoning), t.think_end_id]
        content = message["content"]
        if calls := message.get("tool_calls"):
            content += f"\n\n<{GAP} calls>\n" + "\n".join(_invoke(call["function"]) for call in calls) + f"\n</{GAP} calls>"
        for i, piece in enumerate(t.encode_many(content.split(GAP))):
            ids += [t.dsml_id, *piece] if i else piece
        ids.append(t.eos_id)
        return ids


def _invoke(function: dict[str, Any]) -> str:
    lines = [f'<{GAP} invoke name="{function["name"]}">']
    for key, value in json.loads(function["arguments"]).items():
        quoted = isinstance(value, str)
        text = value if quoted else json.dumps(value, ensure_ascii=False)
        lines.append(f'<{GAP} parameter name="{key}" string="{str(quoted).lower()}">{text}</{GAP} parameter>')
    return "\n".join([*lines, f"</{GAP} invoke>"])
