"""Task `tools`: choose a tool and its arguments, say what its result means, or answer without one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from forebay.model.demo.tasks import words as w
from forebay.model.demo.tasks.chat import any_turn
from forebay.model.demo.tasks.conversation import (
    TRIES,
    Conversation,
    Effort,
    Message,
    Options,
    Turn,
    appears,
    draw,
    draw_effort,
    reasoning,
    reserved,
    system_messages,
)

STAGES = ("call", "call", "call", "call", "result", "result", "result", "none", "none")
PARALLEL = 0.08  # share of questions that need two calls

Draw = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Parameter:
    """Names it goes by, its schema, and how to draw a value."""

    names: tuple[str, ...]
    schema: dict[str, Any]
    value: Draw


@dataclass(frozen=True)
class Tool:
    """A function, under one of its names.

    Attributes:
        asks: questions that need it, with {0}, {1} for its arguments.
        result: keys of what it returns, with how to draw their values.
        says: what the result means, with {0}, {1} for arguments and {key} for the values of the result.
    """

    names: tuple[str, ...]
    description: str
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]
    result: dict[str, Draw]
    says: str


def _of(values: tuple[str, ...]) -> Draw:
    return lambda rng: rng.choice(values)


def _between(low: int, high: int) -> Draw:
    """Whole numbers with every count of digits alike, so that digits are learnt to be copied."""
    spans = [(max(low, first), min(high, after - 1)) for first, after in pairwise((-100, 0, 10, 100, 1000, 10**4, 10**5, 10**6))]
    spans = [(first, last) for first, last in spans if first <= last]
    return lambda rng: rng.randint(*rng.choice(spans))


def _text(values: tuple[str, ...], *names: str) -> Parameter:
    return Parameter(names, {"type": "string"}, _of(values))


def _enum(values: tuple[str, ...], *names: str) -> Parameter:
    return Parameter(names, {"type": "string", "enum": list(values)}, _of(values))


def _whole(low: int, high: int, *names: str) -> Parameter:
    return Parameter(names, {"type": "integer"}, _between(low, high))


CITY = _text(w.PLACES, "city", "city", "place", "location")
PERSON = _text(w.NAMES, "name", "person")
THING = _text(w.NOUNS, "item", "thing", "product")
DAY = _enum(w.DAYS, "day", "weekday")
SKY = _of(("sunny", "cloudy", "rainy", "windy", "foggy"))
DONE: dict[str, Draw] = {"status": _of(("ok",))}

ROOMS = ("kitchen", "bedroom", "bathroom", "hall", "office", "cellar", "garage")
HOUSES = ("Central", "Plaza", "Royal", "Garden", "Park")
FILES = tuple(f"{name}.{ending}" for name in w.NOUNS[:50] for ending in ("txt", "md", "py"))
MESSAGES = tuple(
    f"{what} {when}" for what in ("I am late", "Call me", "See you", "Dinner is ready", "I will come")
    for when in ("today", "soon", "at noon", "tonight")
)  # fmt: skip

POOL: tuple[Tool, ...] = (
    Tool(("get_weather", "weather", "current_weather"), "Get the current weather of a city.", (CITY,),
         ("What is the weather in {0}?", "How is the weather in {0}?", "What's the weather like in {0}?", "Is it nice outside in {0}?"),
         {"temperature": _between(-9, 38), "sky": SKY}, "In {0} it is {sky} with {temperature} degrees."),
    Tool(("get_forecast", "weather_forecast"), "Get the weather forecast of a city for a day.", (CITY, DAY),
         ("What will the weather be in {0} on {1}?", "How will the weather be in {0} on {1}?"),
         {"temperature": _between(-9, 38), "sky": SKY}, "On {1} it will be {sky} in {0} with {temperature} degrees."),
    Tool(("get_time", "current_time", "local_time"), "Get the local time of a city.", (CITY,),
         ("What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"),
         {"hour": _between(0, 23), "minute": _between(10, 59)}, "In {0} it is {hour}:{minute}."),
    Tool(("get_population", "population"), "Get the number of inhabitants of a city.", (CITY,),
         ("How many people live in {0}?", "What is the population of {0}?"),
         {"population": _between(100, 999999)}, "{0} has {population} inhabitants."),
    Tool(("send_message", "send_text"), "Send a message to a person.", (PERSON, _text(MESSAGES, "text", "message")),
         ('Send {0} the message "{1}".', 'Tell {0}: "{1}".', 'Write to {0}: "{1}".'), DONE, "The message was sent to {0}."),
    Tool(("call_person", "phone_call"), "Call a person on the phone.", (PERSON,),
         ("Call {0}.", "Phone {0}, please.", "Please call {0}."),
         {"answered": lambda rng: rng.random() < 0.5}, "The call to {0} was made."),
    Tool(("get_phone_number", "find_phone_number"), "Find the phone number of a person.", (PERSON,),
         ("What is the phone number of {0}?", "Find the phone number of {0}."),
         {"number": _between(100000, 999999)}, "The phone number of {0} is {number}."),
    Tool(("get_birthday", "find_birthday"), "Find the birthday of a person.", (PERSON,),
         ("When is the birthday of {0}?", "When was {0} born?"),
         {"month": _of(w.MONTHS), "day": _between(1, 28)}, "The birthday of {0} is {month} {day}."),
    Tool(("set_alarm", "add_alarm"), "Set an alarm at an hour.", (_whole(0, 23, "hour"),),
         ("Set an alarm at {0} o'clock.", "Wake me at {0} o'clock."), DONE, "The alarm is set to {0} o'clock."),
    Tool(("set_timer", "start_timer"), "Start a timer.", (_whole(1, 9999, "minutes"),),
         ("Set a timer to {0} minutes.", "Start a timer of {0} minutes."), DONE, "The timer runs for {0} minutes."),
    Tool(("add_event", "create_event"), "Add an event to the calendar.", (_text(
             ("dinner", "meeting", "concert", "party", "lesson", "test", "talk", "picnic", "lunch", "workshop"), "title", "event"), DAY),
         ("Add a {0} on {1} to my calendar.", "Put a {0} on {1} into the calendar."), DONE, "The {0} on {1} is in the calendar."),
    Tool(("list_events", "get_events"), "List the calendar events of a day.", (DAY,),
         ("What is in my calendar on {0}?", "What do I have to do on {0}?"),
         {"event": _of(("dinner", "meeting", "concert", "party", "lesson"))},
         "On {0} there is a {event}."),
    Tool(("get_price", "find_price", "price_of"), "Find the price of a product in euros.", (THING,),
         ("How much does the {0} cost?", "What is the price of the {0}?"),
         {"price": _between(1, 9999)}, "The {0} costs {price} euros."),
    Tool(("check_stock", "get_stock"), "See how many pieces of a product are in stock.", (THING,),
         ("How many pieces of the {0} are in stock?", "Is the {0} in stock?"),
         {"pieces": _between(0, 9999)}, "There are {pieces} pieces of the {0} in stock."),
    Tool(("order_product", "buy_product"), "Order pieces of a product.", (THING, _whole(1, 9999, "count", "quantity")),
         ("Order {1} pieces of the {0}.", "Buy {1} pieces of the {0}."),
         {"order": _between(0, 9999)}, "The order has the number {order}."),
    Tool(("track_order", "get_order"), "Get the state of an order.", (_whole(0, 9999, "order", "number"),),
         ("Where is my order {0}?", "What is the state of order {0}?"),
         {"state": _of(("packed", "sent", "delivered", "lost", "delayed"))},
         "The order {0} is {state}."),
    Tool(("translate", "translate_word"), "Translate a word into a language.",
         (_text(w.CODE_WORDS, "word", "text"), _text(w.LANGUAGES, "language")),
         ('Translate "{0}" into {1} with the tool.', 'Use the tool: what is "{0}" in {1}?'),
         {"translation": _of(w.CODE_WORDS)},
         'The {1} word for "{0}" is {translation}.'),
    Tool(("convert_currency", "exchange"), "Convert an amount from one currency to another.",
         (_whole(0, 9999, "amount"), _text(w.CURRENCIES, "source", "from"), _text(w.CURRENCIES, "target", "to")),
         ("How much are {0} {1} in {2}?", "Convert {0} {1} to {2}."),
         {"amount": _between(1, 9999)}, "{0} {1} are {amount} {2}."),
    Tool(("calculate_distance", "get_distance"), "Get the distance between two cities in kilometres.",
         (_text(w.PLACES, "start", "origin"), _text(w.PLACES, "goal", "destination")),
         ("How far is it from {0} to {1}?", "What is the distance from {0} to {1}?"),
         {"kilometres": _between(1, 9999)},
         "From {0} to {1} it is {kilometres} kilometres."),
    Tool(("find_train", "get_train"), "Find the next train between two cities.",
         (_text(w.PLACES, "start", "origin"), _text(w.PLACES, "goal", "destination")),
         ("When is the next train from {0} to {1}?", "Find a train from {0} to {1}."),
         {"hour": _between(0, 23), "track": _between(1, 20)},
         "The next train from {0} to {1} leaves at {hour} o'clock from track {track}."),
    Tool(("book_hotel", "reserve_hotel"), "Book a hotel in a city.", (CITY, _whole(1, 9999, "nights")),
         ("Book a hotel in {0} for {1} nights.", "I need a hotel in {0} for {1} nights."),
         {"hotel": _of(HOUSES)},
         "The hotel {hotel} in {0} is booked for {1} nights."),
    Tool(("find_restaurant", "search_restaurant"), "Find a restaurant in a city.", (_text(w.FOODS, "food", "dish"), CITY),
         ("Where can I eat {0} in {1}?", "Find a restaurant with {0} in {1}."),
         {"restaurant": _of(HOUSES)},
         "You can eat {0} in {1} at the restaurant {restaurant}."),
    Tool(("get_recipe", "find_recipe"), "Find a recipe for a dish.", (_text(w.FOODS, "dish", "food"),),
         ("How do I cook {0}?", "Find a recipe for {0}."),
         {"minutes": _between(5, 120), "page": _between(1, 9999)},
         "The recipe for {0} is on page {page} and takes {minutes} minutes."),
    Tool(("play_music", "start_music"), "Play music of a kind.",
         (_enum(("jazz", "rock", "opera", "folk", "soul", "techno"), "kind", "genre"),),
         ("Play some {0}.", "I want to hear {0}."), DONE, "The {0} is playing."),
    Tool(("set_light", "switch_light"), "Switch the light of a room.",
         (_text(ROOMS, "room"), _enum(("on", "off"), "state")),
         ("Switch the light in the {0} {1}.", "Turn the light in the {0} {1}."), DONE, "The light in the {0} is {1}."),
    Tool(("set_temperature", "heat_room"), "Set the temperature of a room.",
         (_text(ROOMS, "room"), _whole(0, 9999, "degrees", "temperature")),
         ("Set the {0} to {1} degrees.", "Heat the {0} to {1} degrees."), DONE, "The {0} is set to {1} degrees."),
    Tool(("search_books", "find_book"), "Find a book about a topic.", (_text(w.SPORTS, "topic", "subject"),),
         ("Find a book about {0}.", "Is there a book about {0}?"),
         {"author": _of(w.NAMES), "year": _between(1900, 2025)},
         "There is a book about {0} by {author} from {year}."),
    Tool(("read_file", "open_file"), "Read a file.", (_text(FILES, "path", "file"),),
         ("What is in the file {0}?", "Read the file {0}."),
         {"text": _of(w.CODE_WORDS)}, "The file {0} contains the text {text}."),
    Tool(("count_lines", "line_count"), "Count the lines of a file.", (_text(FILES, "path", "file"),),
         ("How many lines has the file {0}?", "Count the lines of the file {0}."),
         {"lines": _between(1, 9999)}, "The file {0} has {lines} lines."),
    Tool(("add_task", "create_task"), "Add a task to the list of a person.", (PERSON, _text(
             ("cleaning", "shopping", "cooking", "painting", "packing", "washing", "baking", "gardening"), "task", "work")),
         ("Give {0} the task {1}.", "Add the task {1} for {0}."),
         {"id": _between(0, 9999)}, "The task {1} of {0} has the number {id}."),
    Tool(("roll_dice", "throw_dice"), "Roll dice.", (_whole(1, 9999, "count", "dice"),),
         ("Roll {0} dice.", "Please throw {0} dice."), {"sum": _between(1, 9999)}, "The dice show {sum}."),
    Tool(("get_user", "find_user"), "Find the data of a user by number.", (_whole(0, 9999, "id", "number"),),
         ("Who is user {0}?", "Which name has user {0}?"),
         {"name": _of(w.NAMES), "city": _of(w.PLACES)}, "User {0} is {name} from {city}."),
    Tool(("add_numbers", "sum_numbers"), "Add two numbers.", (_whole(0, 9999, "a", "first"), _whole(0, 9999, "b", "second")),
         ("Add {0} and {1} with the tool.", "Use the tool to add {0} and {1}."), {"total": _between(0, 9999)}, "The total is {total}."),
    Tool(("pay_invoice", "settle_invoice"), "Pay an invoice by number.",
         (_whole(0, 9999, "invoice", "number"), _whole(0, 9999, "euros", "amount")),
         ("Pay {1} euros for invoice {0}.", "Settle invoice {0} with {1} euros."), DONE, "Invoice {0} is paid with {1} euros."),
    Tool(("dial_number", "dial"), "Dial a short number.", (_whole(0, 9999, "digits", "number"),),
         ("Dial {0}.", "Dial the number {0}, please."), {"answered": lambda rng: rng.random() < 0.5}, "The number {0} was dialled."),
    Tool(("open_locker", "unlock_locker"), "Open a locker with its code.", (_whole(0, 9999, "locker"), _whole(0, 9999, "code")),
         ("Open locker {0} with the code {1}.", "The code of locker {0} is {1}. Open it."), DONE, "Locker {0} is open."),
)  # fmt: skip


@dataclass(frozen=True)
class Need:
    """A tool under the name that a conversation gives it, with the arguments of one call."""

    tool: Tool
    name: str
    arguments: dict[str, Any]

    def key(self) -> str:
        return json.dumps([self.tool.names[0], list(self.arguments.values())])

    def ask(self, rng: random.Random) -> str:
        return rng.choice(self.tool.asks).format(*self.arguments.values())

    def call(self, index: int) -> dict[str, Any]:
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": f"call_{index}", "type": "function", "function": function}


def _offer(rng: random.Random, tool: Tool) -> tuple[dict[str, Any], list[str]]:
    """The definition of a tool under drawn names, and the names of its parameters."""
    names = [rng.choice(parameter.names) for parameter in tool.parameters]
    properties = {name: dict(parameter.schema) for name, parameter in zip(names, tool.parameters, strict=True)}
    if rng.random() < 0.2:
        for name, schema in properties.items():
            schema["description"] = f"The {name}."
    schema = {"type": "object", "properties": properties, "required": names}
    return {"type": "function", "function": {"name": rng.choice(tool.names), "description": tool.description, "parameters": schema}}, names


@cache
def _testable() -> tuple[Tool, ...]:
    """Tools with arguments that are held out; where there are few, none may be."""
    rng = random.Random(0)
    return tuple(tool for tool in POOL if any(reserved(_drawn(rng, tool, *_offer(rng, tool)).key()) for _ in range(TRIES)))


def _drawn(rng: random.Random, tool: Tool, definition: dict[str, Any], names: list[str]) -> Need:
    values = [parameter.value(rng) for parameter in tool.parameters]
    return Need(tool, definition["function"]["name"], dict(zip(names, values, strict=True)))


def _need(rng: random.Random, options: Options, tool: Tool, definition: dict[str, Any], names: list[str]) -> Need:
    def make(rng: random.Random) -> tuple[str, Need]:
        need = _drawn(rng, tool, definition, names)
        return need.key(), need

    return draw(rng, options, make)


def tools(rng: random.Random, options: Options) -> Conversation:
    """A question with one to five tools. Stage `call` wants the call, `result` what its result means, `none` a plain answer."""
    effort = draw_effort(rng, options)
    stage = rng.choice(STAGES)
    chosen = rng.sample(_testable() if options.held_out else POOL, rng.choice((1, 1, 2, 2, 3, 3, 4, 5)))
    offered = [_offer(rng, tool) for tool in chosen]
    messages = system_messages(rng)
    if rng.random() < 0.15:
        messages += _without_tool(rng, effort)[0]
    meta: dict[str, Any] = {"stage": stage, "tools": len(chosen), "calls": [], "effort": effort}
    body: dict[str, Any] = {"messages": messages, "tools": [definition for definition, _ in offered], "reasoning_effort": effort}
    if stage == "none":
        turn, meta["expect"] = _without_tool(rng, effort)
        messages.append(turn[0])
        return Conversation("tools", body, turn[1], meta)

    needs = []
    for i in rng.sample(range(len(chosen)), 1 + (len(chosen) > 1 and rng.random() < PARALLEL)):
        needs.append(_need(rng, options, chosen[i], *offered[i]))
    question = " ".join(need.ask(rng) for need in needs)
    called = Turn(question, "", _call_thinking(question, needs), [need.call(i) for i, need in enumerate(needs)])
    messages.append({"role": "user", "content": question})
    meta["calls"] = [{"name": need.name, "arguments": need.arguments} for need in needs]
    if stage == "call":
        return Conversation("tools", body, called.answer(effort), meta)

    messages.append(called.answer(effort))
    said, values = [], []
    for i, need in enumerate(needs):
        result = {key: value(rng) for key, value in need.tool.result.items()}
        messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": json.dumps(result, ensure_ascii=False)})
        said.append(need.tool.says.format(*need.arguments.values(), **result))
        slots = {**{str(k): value for k, value in enumerate(need.arguments.values())}, **result}
        values += [str(value) for key, value in slots.items() if f"{{{key}}}" in need.tool.says]
    content = " ".join(said)
    meta["expect"] = values
    thinking = ("The tool has answered.", f"The tool {needs[0].name} has answered. I tell the user.",
                f"The tool {needs[0].name} has answered {messages[-len(needs)]['content']}. I tell the user what it means.")  # fmt: skip
    return Conversation("tools", body, Turn("", content, thinking).answer(effort), meta)


def _call_thinking(question: str, needs: list[Need]) -> tuple[str, str, str]:
    names = " and ".join(need.name for need in needs)
    details = " ".join(f"I call {need.name}: {', '.join(f'{key} is {value}' for key, value in need.arguments.items())}." for need in needs)
    return f"I call {names}.", details, f"The user says: {question} A tool helps here. {details}"


def _without_tool(rng: random.Random, effort: Effort) -> tuple[list[Message], list[str]]:
    """A question that needs no tool with its answer, and what the reply must say."""
    turn, expect = any_turn(rng)
    answer: Message = {"role": "assistant", "content": turn.content}
    if effort != "none":
        _, medium, long = turn.thinking
        lead = "No tool is needed."
        answer["reasoning_content"] = reasoning(effort, (lead, f"{lead} {medium}", f"{lead} {long}"))
    return [{"role": "user", "content": turn.question}, answer], [expect]


def check_tools(c: Conversation, reply: dict[str, Any]) -> bool:
    """`call`: exactly the right tools are called. Otherwise no tool is, and every value that the answer needs appears."""
    called = [call["function"]["name"] for call in reply.get("tool_calls") or ()]
    if c.meta["stage"] == "call":
        return sorted(called) == sorted(call["name"] for call in c.meta["calls"])
    return not called and all(appears(value, reply.get("content") or "") for value in c.meta["expect"])


def check_arguments(c: Conversation, reply: dict[str, Any]) -> bool:
    """Whether the calls of `reply` equal the reference's, arguments included; true where none is wanted and none is made."""
    calls = c.meta["calls"] if c.meta["stage"] == "call" else []
    wanted = sorted(json.dumps([call["name"], call["arguments"]], sort_keys=True) for call in calls)
    made = []
    for call in reply.get("tool_calls") or ():
        try:
            made.append(json.dumps([call["function"]["name"], json.loads(call["function"]["arguments"])], sort_keys=True))
        except ValueError:
            return False
    return sorted(made) == wanted
