"""The closed world of emoji-64: its concepts, styles, background colours and what is held out from training.

A concept is a short noun phrase mapped to the icon name that three open emoji sets share. The list leaves out people,
flags, letters and keycaps, and takes the face of an animal where a set has both face and body: at 64 x 64 pixels the
face is what a stranger recognises.
"""

from __future__ import annotations

STYLES: dict[str, str] = {"shaded": "noto", "flat": "twemoji", "fluent": "fluent-emoji-flat"}
"""Drawing style -> icon set. The first is meant when a caption names no style."""

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "red": (236, 112, 112),
    "blue": (112, 172, 242),
    "green": (134, 208, 138),
    "yellow": (255, 222, 92),
    "gray": (172, 178, 186),
    "black": (28, 30, 36),
}
"""Background colour -> RGB. The first is meant when a caption names no background."""

SIZES = ("", "small", "mirrored")
"""Words before the noun: plain, 40 x 40 pixels in the middle, flipped left to right."""

_SAME_NAME = """
airplane alarm-clock alien ambulance american-football anchor angry-face ant avocado axe baby-bottle backpack
balloon banana baseball basketball battery bear bed beer-mug bell bell-pepper bicycle bird birthday-cake black-cat
black-heart blossom blue-book blue-circle blue-heart blue-square bomb books boxing-glove bread broccoli broken-heart
brown-circle brown-square bullseye bus butterfly cactus camera candle candy carrot castle cherries chicken
chocolate-bar christmas-tree circus-tent cloud cookie crab crescent-moon crocodile croissant crown crystal-ball
cupcake deer desert-island desktop-computer dolphin door doughnut dove dress drum duck eggplant elephant factory
fire fish flamingo floppy-disk flying-saucer fox french-fries frog full-moon game-die gear ghost giraffe glasses
grapes green-apple green-book green-circle green-heart green-square guitar hamburger hamster hedgehog helicopter
honey-pot hot-dog hot-pepper house ice-cream jeans jellyfish joystick kangaroo key koala laptop lemon leopard
light-bulb lime lion locomotive lollipop magnet maple-leaf money-bag motorcycle mountain mushroom necktie octopus
onion open-book orange-book orange-circle orange-heart orange-square owl package palm-tree pancakes panda parrot
party-popper peach pear pencil penguin pineapple pizza polar-bear police-car popcorn potato potted-plant pretzel
purple-circle purple-heart purple-square puzzle-piece rainbow red-apple red-circle red-heart red-square robot rocket
rooster rose sailboat scissors seedling shark shield ship skateboard sleeping-face snail snake snowflake snowman
spider star strawberry sun sunflower sunglasses sushi t-shirt taco tangerine taxi teapot teddy-bear television
tennis tent toilet tomato top-hat tractor train trophy tropical-fish trumpet tulip turtle umbrella unicorn violin
volcano watch watermelon whale wine-glass winking-face wolf wrapped-gift yellow-circle yellow-heart yellow-square
zebra
""".split()

_RENAMED = {
    "autumn leaf": "fallen-leaf",
    "beach umbrella": "umbrella-on-ground",
    "bee": "honeybee",
    "boot": "hiking-boot",
    "bow": "ribbon",
    "car": "automobile",
    "cat": "cat-face",
    "cell phone": "mobile-phone",
    "cheese": "cheese-wedge",
    "chick": "front-facing-baby-chick",
    "clover": "four-leaf-clover",
    "cocktail": "cocktail-glass",
    "cool face": "smiling-face-with-sunglasses",
    "corn": "ear-of-corn",
    "cow": "cow-face",
    "crying face": "loudly-crying-face",
    "diamond": "gem-stone",
    "dinosaur": "t-rex",
    "dog": "dog-face",
    "dragon": "dragon-face",
    "fire truck": "fire-engine",
    "football": "soccer-ball",
    "globe": "globe-showing-europe-africa",
    "hat": "womans-hat",
    "heart eyes face": "smiling-face-with-heart-eyes",
    "high heel": "high-heeled-shoe",
    "horse": "horse-face",
    "hourglass": "hourglass-done",
    "kiwi": "kiwi-fruit",
    "knife": "kitchen-knife",
    "ladybug": "lady-beetle",
    "leaf": "leaf-fluttering-in-wind",
    "lightning bolt": "high-voltage",
    "magnifying glass": "magnifying-glass-tilted-left",
    "monkey": "monkey-face",
    "mouse": "mouse-face",
    "padlock": "locked",
    "paint palette": "artist-palette",
    "pig": "pig-face",
    "pine tree": "evergreen-tree",
    "planet": "ringed-planet",
    "pool ball": "pool-8-ball",
    "poop": "pile-of-poo",
    "pumpkin": "jack-o-lantern",
    "rabbit": "rabbit-face",
    "race car": "racing-car",
    "red book": "closed-book",
    "sad face": "frowning-face",
    "smiling face": "smiling-face-with-smiling-eyes",
    "sneaker": "running-shoe",
    "snowy mountain": "snow-capped-mountain",
    "tiger": "tiger-face",
    "traffic light": "vertical-traffic-light",
    "tree": "deciduous-tree",
    "truck": "delivery-truck",
    "water drop": "droplet",
    "wave": "water-wave",
    "yarn ball": "yarn",
}

NO_ARTICLE = frozenset(
    {
        "books",
        "bread",
        "broccoli",
        "candy",
        "cheese",
        "cherries",
        "corn",
        "fire",
        "french fries",
        "glasses",
        "grapes",
        "jeans",
        "pancakes",
        "poop",
        "popcorn",
        "scissors",
        "sunglasses",
        "sushi",
    }
)
"""Plural and mass nouns, written without "a"."""

HELD_OUT_CONCEPTS = frozenset(
    {"green apple", "purple heart", "green book", "black cat", "orange square", "blue circle", "brown square", "yellow heart"}
)
"""Concepts never trained on. Their words all occur in other captions."""


def concepts() -> dict[str, str]:
    """All concepts.

    Returns:
        Short noun phrase -> icon name, sorted by phrase.
    """
    out = {name.replace("-", " "): name for name in _SAME_NAME}
    out.update(_RENAMED)
    return dict(sorted(out.items()))
