"""Write bench/speculation.jsonl: 200 requests of five kinds, on which speculation is measured.

    python bench/speculation_corpus.py              all but the replies to `chat`, which stay as they are
    python bench/speculation_corpus.py --record     also let SmolLM2-135M-Instruct answer `chat`, at temperature 0.8

A line has `kind`, `prompt` (the user's message), `reply` and, for `json`, `schema`. The replies are without mistakes; a
test sampler repeats them for models that cannot answer. All texts were written for infd, but for the replies to `chat`,
which SmolLM2-135M-Instruct wrote. The corpus was fixed before any drafter or the control of drafts was tuned: a change
makes earlier figures incomparable.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = Path(__file__).with_name("speculation.jsonl")
EACH = 40  # requests of a kind

# (language, code, function, its new name, variable, its new name, constant, its new value, docstring or comment)
CODE = (
    (
        "python",
        """def moving_average(values, window=5):
    if window < 1:
        raise ValueError("window must be positive")
    total = 0.0
    averages = []
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        if index >= window - 1:
            averages.append(total / window)
    return averages
""",
        ("moving_average", "rolling_mean"),
        ("total", "running_sum"),
        ("window=5", "window=20"),
    ),
    (
        "python",
        """class Inventory:
    def __init__(self, capacity=100):
        self.capacity = capacity
        self.items = {}

    def add(self, name, count):
        if self.size() + count > self.capacity:
            raise OverflowError("the shelf is full")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        left = self.items.get(name, 0) - count
        if left < 0:
            raise KeyError(name)
        self.items[name] = left

    def size(self):
        return sum(self.items.values())
""",
        ("Inventory", "Stockroom"),
        ("items", "counts"),
        ("capacity=100", "capacity=2500"),
    ),
    (
        "javascript",
        """async function fetchOrders(customerId, retries = 3) {
  const url = `/api/customers/${customerId}/orders`;
  for (let attempt = 0; attempt < retries; attempt += 1) {
    const response = await fetch(url);
    if (response.ok) {
      const orders = await response.json();
      return orders.filter((order) => order.status !== "cancelled");
    }
    await sleep(200 * (attempt + 1));
  }
  throw new Error(`no orders of customer ${customerId}`);
}
""",
        ("fetchOrders", "loadOrders"),
        ("customerId", "accountId"),
        ("retries = 3", "retries = 8"),
    ),
    (
        "python",
        """def parse_config(text):
    settings = {}
    section = "default"
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
            continue
        key, separator, value = line.partition("=")
        if not separator:
            raise SyntaxError(f"line {number} has no =")
        settings.setdefault(section, {})[key.strip()] = value.strip()
    return settings
""",
        ("parse_config", "read_ini"),
        ("settings", "found"),
        ('section = "default"', 'section = "global"'),
    ),
    (
        "go",
        """func (c *Cache) Get(key string) (string, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	entry, ok := c.entries[key]
	if !ok {
		c.misses++
		return "", false
	}
	if time.Since(entry.added) > 5*time.Minute {
		delete(c.entries, key)
		c.misses++
		return "", false
	}
	c.hits++
	return entry.value, true
}
""",
        ("Get", "Lookup"),
        ("entry", "item"),
        ("5*time.Minute", "30*time.Second"),
    ),
    (
        "sql",
        """SELECT customers.id, customers.name, SUM(orders.amount) AS revenue
FROM customers
JOIN orders ON orders.customer_id = customers.id
WHERE orders.placed_at >= '2023-01-01'
  AND customers.region = 'north'
GROUP BY customers.id, customers.name
HAVING SUM(orders.amount) > 1000
ORDER BY revenue DESC
LIMIT 50;
""",
        ("customers", "clients"),
        ("revenue", "turnover"),
        ("LIMIT 50", "LIMIT 500"),
    ),
    (
        "rust",
        """pub fn word_counts(text: &str) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    for word in text.split_whitespace() {
        let word = word.trim_matches(|c: char| !c.is_alphanumeric());
        if word.len() < 2 {
            continue;
        }
        *counts.entry(word.to_lowercase()).or_insert(0) += 1;
    }
    counts
}
""",
        ("word_counts", "count_words"),
        ("counts", "totals"),
        ("word.len() < 2", "word.len() < 4"),
    ),
    (
        "python",
        """def shortest_path(graph, start, goal):
    queue = [(0, start, [start])]
    visited = set()
    while queue:
        distance, node, path = heapq.heappop(queue)
        if node == goal:
            return distance, path
        if node in visited:
            continue
        visited.add(node)
        for neighbour, weight in graph[node].items():
            if neighbour not in visited:
                heapq.heappush(queue, (distance + weight, neighbour, [*path, neighbour]))
    return None, []
""",
        ("shortest_path", "find_route"),
        ("visited", "settled"),
        ("queue = [(0, start", "queue = [(0.0, start"),
    ),
    (
        "html",
        """<form id="signup" action="/signup" method="post">
  <label for="email">Email</label>
  <input id="email" name="email" type="email" required>
  <label for="password">Password</label>
  <input id="password" name="password" type="password" minlength="8" required>
  <label for="country">Country</label>
  <select id="country" name="country">
    <option value="de">Germany</option>
    <option value="fr">France</option>
    <option value="pl">Poland</option>
  </select>
  <button type="submit">Create account</button>
</form>
""",
        ("signup", "register"),
        ("country", "region"),
        ('minlength="8"', 'minlength="12"'),
    ),
    (
        "typescript",
        """export function paginate<T>(rows: T[], page: number, perPage = 25): Page<T> {
  const pages = Math.max(1, Math.ceil(rows.length / perPage));
  const current = Math.min(Math.max(page, 1), pages);
  const start = (current - 1) * perPage;
  return {
    rows: rows.slice(start, start + perPage),
    page: current,
    pages,
    hasNext: current < pages,
    hasPrevious: current > 1,
  };
}
""",
        ("paginate", "pageOf"),
        ("perPage", "pageSize"),
        ("perPage = 25", "perPage = 100"),
    ),
)

PEOPLE = [
    "Anna Kowalski",
    "Rafael Ortega",
    "Mei Tanaka",
    "Lukas Brandt",
    "Priya Nair",
    "Tom Whitfield",
    "Sofia Lindqvist",
    "Omar Haddad",
    "Elena Petrova",
    "Jonas Meyer",
    "Grace Okafor",
    "Hugo Lefevre",
    "Ines Moreau",
    "Viktor Novak",
    "Clara Rossi",
    "Samir Patel",
]
TOWNS = [
    "Gdansk",
    "Valencia",
    "Osaka",
    "Leipzig",
    "Pune",
    "Leeds",
    "Uppsala",
    "Amman",
    "Varna",
    "Bern",
    "Lagos",
    "Lyon",
    "Porto",
    "Brno",
]
GOODS = [
    "oak table",
    "desk lamp",
    "garden hose",
    "bicycle pump",
    "coffee grinder",
    "rain jacket",
    "wool blanket",
    "tool box",
    "rice cooker",
    "camping stove",
    "book shelf",
    "wall clock",
]
STREETS = [
    "Mill Lane",
    "Station Road",
    "Harbour Street",
    "Park Avenue",
    "Church Hill",
    "Canal Side",
    "Kings Way",
    "Elm Grove",
]

# Aligned parts of sentences: English, German, French, Spanish.
LANGUAGES = ("German", "French", "Spanish")
SUBJECTS = (
    ("Our new neighbour", "Unsere neue Nachbarin", "Notre nouvelle voisine", "Nuestra nueva vecina"),
    ("The old fisherman", "Der alte Fischer", "Le vieux pêcheur", "El viejo pescador"),
    ("My younger brother", "Mein jüngerer Bruder", "Mon petit frère", "Mi hermano menor"),
    ("The baker's daughter", "Die Tochter des Bäckers", "La fille du boulanger", "La hija del panadero"),
    ("The head of the school", "Die Leiterin der Schule", "La directrice de l'école", "La directora de la escuela"),
)
ACTS = (
    ("bought a used car", "kaufte ein gebrauchtes Auto", "a acheté une voiture d'occasion", "compró un coche usado"),
    ("painted the kitchen blue", "strich die Küche blau", "a peint la cuisine en bleu", "pintó la cocina de azul"),
    (
        "lost the keys to the cellar",
        "verlor die Schlüssel zum Keller",
        "a perdu les clés de la cave",
        "perdió las llaves del sótano",
    ),
    ("wrote a long letter", "schrieb einen langen Brief", "a écrit une longue lettre", "escribió una carta larga"),
    ("missed the last train", "verpasste den letzten Zug", "a raté le dernier train", "perdió el último tren"),
    ("planted three apple trees", "pflanzte drei Apfelbäume", "a planté trois pommiers", "plantó tres manzanos"),
)
PLACES = (
    ("in the village", "im Dorf", "au village", "en el pueblo"),
    ("near the river", "in der Nähe des Flusses", "près de la rivière", "cerca del río"),
    ("behind the station", "hinter dem Bahnhof", "derrière la gare", "detrás de la estación"),
    (
        "on the other side of the hill",
        "auf der anderen Seite des Hügels",
        "de l'autre côté de la colline",
        "al otro lado de la colina",
    ),
)
REASONS = (
    (
        "because nobody else had time",
        "weil sonst niemand Zeit hatte",
        "parce que personne d'autre n'avait le temps",
        "porque nadie más tenía tiempo",
    ),
    ("although it was raining hard", "obwohl es stark regnete", "bien qu'il plût à verse", "aunque llovía mucho"),
    (
        "as soon as the winter was over",
        "sobald der Winter vorbei war",
        "dès que l'hiver fut terminé",
        "en cuanto terminó el invierno",
    ),
    (
        "before the guests arrived",
        "bevor die Gäste ankamen",
        "avant l'arrivée des invités",
        "antes de que llegaran los invitados",
    ),
    ("without telling anyone", "ohne jemandem etwas zu sagen", "sans le dire à personne", "sin decírselo a nadie"),
)

CHAT = (
    "Why does bread rise, and what happens when it is left too long?",
    "I have two hours in the evening and want to learn to draw. How should I begin?",
    "Explain compound interest to a twelve-year-old.",
    "What should I pack for a four-day hike in autumn?",
    "Is it better to water plants in the morning or in the evening?",
    "Give me three ideas for a birthday party in a small flat.",
    "How do noise-cancelling headphones work?",
    "My cat wakes me at five every morning. What can I do?",
    "What is the difference between weather and climate?",
    "Write a short poem about a lighthouse in fog.",
    "How do I tell a friend that I cannot lend them money?",
    "Why is the sea salty and rivers are not?",
    "Suggest a simple dinner with lentils and carrots.",
    "What makes a good question in a job interview?",
    "How can I remember names better?",
    "Describe a market on a rainy morning in a few sentences.",
    "Why do leaves change colour?",
    "How do I start running after years without sport?",
    "What is a good way to settle an argument between children?",
    "Explain what an operating system does.",
    "I am nervous before talks. What helps?",
    "How does a refrigerator keep food cold?",
    "What are the advantages of living in a small town?",
    "Give me advice for my first week in a new job.",
    "How do birds find their way over the sea?",
    "What should I look at when I buy a used bicycle?",
    "Tell me a story about a clock that runs backwards.",
    "Why do we dream?",
    "How can a family of four save electricity?",
    "What is the point of learning history?",
    "How do I keep basil alive on a windowsill?",
    "Explain how vaccines protect people who are not vaccinated.",
    "What is a polite way to end a long phone call?",
    "Should I learn the guitar or the piano first?",
    "Why are old stone bridges so strong?",
    "How do I write a letter of complaint that gets an answer?",
    "What is the best way to read a difficult book?",
    "How do tides work?",
    "Give me a plan for cleaning a flat in one afternoon.",
    "What would you show a visitor who has one day in your town?",
)


def renamed(code: str, name: str, new: str) -> str:
    return re.sub(rf"\b{re.escape(name)}\b", lambda _: new, code)


def code_edits() -> Iterator[dict[str, Any]]:
    for language, code, function, variable, constant in CODE:
        changes = (
            (f"Rename `{function[0]}` to `{function[1]}`.", renamed(code, *function)),
            (f"Rename `{variable[0]}` to `{variable[1]}` everywhere.", renamed(code, *variable)),
            (f"Change `{constant[0]}` to `{constant[1]}`.", code.replace(*constant)),
            (
                f"Rename `{function[0]}` to `{function[1]}` and change `{constant[0]}` to `{constant[1]}`.",
                renamed(code.replace(*constant), *function),
            ),
        )
        for asked, edited in changes:
            assert edited != code, asked
            prompt = f"{asked} Answer with the whole code only.\n\n```{language}\n{code}```"
            yield {"kind": "code", "prompt": prompt, "reply": f"```{language}\n{edited}```"}


def order(draw: random.Random) -> dict[str, Any]:
    return {
        "number": draw.randrange(10_000, 99_999),
        "name": draw.choice(PEOPLE),
        "goods": draw.choice(GOODS),
        "count": draw.randrange(1, 9),
        "street": f"{draw.randrange(1, 120)} {draw.choice(STREETS)}",
        "town": draw.choice(TOWNS),
        "day": f"{draw.randrange(1, 28)} {draw.choice(('March', 'April', 'May', 'June'))}",
    }


def told(each: dict[str, Any]) -> str:
    return (
        f"On {each['day']} {each['name']} of {each['street']} in {each['town']} ordered {each['count']} times the"
        f" {each['goods']} under number {each['number']}."
    )


def extraction(draw: random.Random) -> Iterator[dict[str, Any]]:
    for at in range(EACH):
        orders = [order(draw) for _ in range(5)]
        text = " ".join(map(told, orders))
        asked, line = (
            ("List every order as `number; name; goods`, one a line.", "{number}; {name}; {goods}"),
            ("List the address of each customer as `name, street, town`, one a line.", "{name}, {street}, {town}"),
            ("Make a table with the columns day, number, count and goods.", "| {day} | {number} | {count} | {goods} |"),
            ("Quote the sentence about each order of more than two pieces.", ""),
        )[at % 4]
        if line:
            head = "| day | number | count | goods |\n|---|---|---|---|\n" if line.startswith("|") else ""
            reply = head + "\n".join(line.format(**each) for each in orders)
        else:
            reply = "\n".join(told(each) for each in orders if each["count"] > 2) or "There is none."
        yield {"kind": "extraction", "prompt": f"{asked}\n\n{text}", "reply": reply}


def json_by_schema(draw: random.Random) -> Iterator[dict[str, Any]]:
    fields = {
        "order_number": ({"type": "integer"}, "number"),
        "customer_name": ({"type": "string"}, "name"),
        "product_description": ({"type": "string"}, "goods"),
        "quantity_ordered": ({"type": "integer"}, "count"),
        "delivery_street": ({"type": "string"}, "street"),
        "delivery_town": ({"type": "string"}, "town"),
        "date_of_order": ({"type": "string"}, "day"),
    }
    for at in range(EACH):
        orders = [order(draw) for _ in range(1 + at % 3)]
        chosen = draw.sample(sorted(fields), 4 + at % 4)
        item = {
            "type": "object",
            "properties": {name: fields[name][0] for name in chosen},
            "required": chosen,
            "additionalProperties": False,
        }
        schema = {
            "type": "object",
            "properties": {"orders": {"type": "array", "items": item}},
            "required": ["orders"],
            "additionalProperties": False,
        }
        reply = {"orders": [{name: each[fields[name][1]] for name in chosen} for each in orders]}
        prompt = f"Give the orders as JSON with the fields {', '.join(chosen)}.\n\n{' '.join(map(told, orders))}"
        yield {"kind": "json", "prompt": prompt, "reply": json.dumps(reply), "schema": schema}


def translation(draw: random.Random) -> Iterator[dict[str, Any]]:
    for at in range(EACH):
        language = at % len(LANGUAGES)
        sentences = [tuple(map(draw.choice, (SUBJECTS, ACTS, PLACES, REASONS))) for _ in range(3)]

        def joined(number: int, sentences: Any = sentences) -> str:
            comma = "," if number == 1 else ""
            return " ".join(f"{s[number]} {a[number]} {p[number]}{comma} {r[number]}." for s, a, p, r in sentences)

        prompt = f"Translate into {LANGUAGES[language]}: {joined(0)}"
        yield {"kind": "translation", "prompt": prompt, "reply": joined(1 + language)}


def chat(replies: dict[str, str]) -> Iterator[dict[str, Any]]:
    for prompt in CHAT:
        yield {"kind": "chat", "prompt": prompt, "reply": replies[prompt]}


def recorded() -> dict[str, str]:
    """Return what SmolLM2 answers to each prompt of `chat`."""
    from infd import LLM

    with LLM("smollm2", max_model_len=1024, kv_cache_bytes="128MiB") as model:
        asked = [[{"role": "user", "content": prompt}] for prompt in CHAT]
        answers = model.chat(asked, max_tokens=160, temperature=0.8, top_p=0.95, seed=7)
    return {prompt: each.choices[0].message.content or "" for prompt, each in zip(CHAT, answers, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="record the replies to `chat` anew")
    if parser.parse_args().record:
        replies = recorded()
    else:
        kept = map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
        replies = {each["prompt"]: each["reply"] for each in kept if each["kind"] == "chat"}
    draw = random.Random(20261127)  # noqa: S311 - texts are no secrets
    lines = [*code_edits(), *extraction(draw), *json_by_schema(draw), *translation(draw), *chat(replies)]
    assert len(lines) == 5 * EACH
    FILE.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
