"""The words and sentences that the long texts are made of. All of it was written for this project.

`{who}`, `{place}` and `{what}` are filled in.
"""

from __future__ import annotations

__all__ = [
    "ADVICE", "COLOURS", "CRAFTS", "DECISIONS", "DEVICES", "EPISODES", "FIRST_NAMES", "GIFTS", "ITEMS", "LAST_NAMES",
    "MONTHS", "OPENINGS", "PLACES", "STATES", "THANKS", "TRAVEL", "VILLAGES", "WEATHER", "WORRIES",
]  # fmt: skip

FIRST_NAMES = (
    "Agnes", "Bruno", "Clara", "David", "Edda", "Felix", "Greta", "Henry", "Ilse", "Jonas", "Karin", "Leo", "Marta",
    "Nils", "Olga", "Peter", "Rosa", "Simon", "Thea", "Ulrich", "Vera", "Walter", "Yvonne", "Zeno",
)  # fmt: skip
LAST_NAMES = (
    "Archer", "Bell", "Carver", "Dale", "Eastman", "Fisher", "Gray", "Hale", "Ingram", "Joiner", "Kerr", "Lowe",
    "Marsh", "North", "Oakes", "Potter", "Reed", "Stone", "Thorne", "Vale", "Weaver", "Young",
)  # fmt: skip
MONTHS = ("January", "February", "March", "April", "May", "June", "September", "October", "November", "December")
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "grey", "orange", "brown", "violet")

# minutes of meetings
PLACES = (
    "harbour", "library", "town hall", "swimming pool", "market square", "fire station", "old mill", "school",
    "railway bridge", "water tower", "theatre", "botanical garden", "boat house", "cemetery wall", "sports hall",
    "museum", "bus depot", "community kitchen", "observatory", "ferry landing", "weather station", "quarry lake",
)  # fmt: skip
ITEMS = (
    "the leaking roof", "new benches", "the broken clock", "a second entrance", "the heating", "bicycle stands",
    "the lights on the stairs", "a fence along the water", "the summer concert", "wheelchair ramps", "the gutters",
    "the parking spaces", "the cracked windows", "a drinking fountain", "the opening hours", "a children's corner",
    "the storage room", "the fire doors", "the lime trees", "an information board", "the loudspeakers",
    "the ticket machine",
)  # fmt: skip
OPENINGS = (
    "{who} reports on {what} at the {place}.",
    "{who} asks about {what} at the {place}.",
    "A letter about {what} at the {place} is read out by {who}.",
    "{who} has looked at {what} at the {place} and shows photographs.",
)
WORRIES = (
    "{who} doubts that it is needed this year.",
    "{who} thinks that it should have been done long ago.",
    "{who} wants to hear a second opinion first.",
    "{who} warns that the neighbours will complain.",
    "{who} reminds the others of what happened in the flood year.",
    "{who} is in favour.",
)
DECISIONS = (
    "Only two members are against it.",
    "Nobody is against it.",
    "The vote is close.",
    "The members agree after a long talk.",
)

# stories
VILLAGES = (
    "Alderby", "Birkholm", "Coldwater", "Dunmere", "Elkford", "Farrow", "Glimmen", "Hestvik", "Ironbeck", "Juniper",
    "Karlsund", "Larkmoor", "Mossgate", "Nettlecombe", "Otterness", "Pinewick", "Quarrybank", "Ravensholt", "Windle",
    "Saltmarsh", "Thistledown", "Underhill", "Viken", "Yarrowdale",
)  # fmt: skip
CRAFTS = (
    "made bells",
    "wove sails",
    "carved spoons",
    "kept bees on every roof",
    "baked bread in one great oven",
    "built boats without a single nail",
    "blew glass so thin that it sang in the wind",
    "dyed wool with onion skins",
    "grew pears against the south walls",
    "repaired clocks for the whole coast",
    "cut stone for bridges",
    "burned charcoal in the forest",
    "bred small grey horses",
    "dried fish on long wooden frames",
    "made paper from reeds",
    "bound books in sheepskin",
    "pressed oil from walnuts",
    "forged hinges and locks",
    "dug salt out of the hill",
    "taught starlings to speak",
)
GIFTS = (
    "a brass compass",
    "a jar of chestnut honey",
    "a map drawn on birch bark",
    "a knife with a bone handle",
    "a bag of dried apples",
    "a whistle that only dogs can hear",
    "a lantern with a cracked pane",
    "a pair of felt boots",
    "a tin of black tea",
    "a rope of forty ells",
    "a mirror no larger than a coin",
    "a wooden flute",
    "a blue glass bottle",
    "a key that fitted no door",
    "a piece of amber with a bee in it",
    "a scarf of undyed wool",
    "an almanac of tides",
    "a bell without a tongue",
    "a stone with a hole",
    "a box of fish hooks",
    "a letter for a stranger",
    "a loaf of rye",
)
WEATHER = (
    "It had rained since noon, and the road was soft.",
    "The morning was clear, and frost lay on the fields.",
    "Fog hung over the marshes, so that the bridge seemed to end in the air.",
    "A dry wind blew dust across the square.",
    "Snow had fallen in the night, and nobody had walked on it yet.",
    "The heat of the day still stood between the walls.",
    "Thunder could be heard behind the hills, but no rain came.",
    "The sky was white, without a single bird.",
    "A rainbow stood over the mill, and the children shouted.",
    "The sun had gone down when the first lamps were lit.",
    "Hail rattled on the roofs for a short while and then stopped.",
    "There was a smell of smoke and wet leaves.",
)
TRAVEL = (
    "walked for two days along the river",
    "took the ferry, which leaked",
    "rode on a cart full of cabbages",
    "followed a shepherd over the pass",
    "went by night, because of the heat",
    "crossed the moor on planks",
    "climbed down the cliff by an iron ladder",
    "slept in a hay barn and went on before sunrise",
    "lost the way twice and found it again by the sound of a mill",
    "was carried across the ford by a farmer",
    "took the road through the beech forest",
    "sailed with a fisherman who did not say a word",
)
ADVICE = (
    "Do not cross the water before noon",
    "Never tell them where you come from",
    "Count the steps on the way down",
    "Ask for the oldest woman in the next village",
    "Keep to the left where the road divides",
    "Leave before the bells ring",
    "Whatever they offer you, drink only milk",
    "Look back once, but not twice",
)
THANKS = (
    "{who} thanked for it and did not know what to do with it.",
    "{who} put it into the coat pocket at once.",
    "{who} would rather have had a meal, but said nothing.",
    "{who} turned it over and over in the lamp light.",
    "At first {who} did not want to take it.",
    "Later {who} often thought of that evening.",
)
EPISODES = (
    "For some days nothing happened that is worth telling. {who} mended shoes, wrote two letters and burned them, "
    "and learned to tell the hour by the colour of the hills.",
    "On the road {who} met a man who carried a door on his back. He had sold the house and kept the door, he said, "
    "because a door is the only part of a house that knows who you are.",
    "{who} counted the coins that were left. There were few enough of them, and one was from a country that did not "
    "exist any more.",
    "There was an inn at the crossroads, and in the inn there was a map of the world on which somebody had rubbed out "
    "the sea. {who} drew it in again with a burnt match.",
    "A child walked beside {who} for an hour without a word. At the edge of the wood it said that it had only wanted "
    "to see whether strangers also get tired, and turned back.",
    "In the afternoon {who} helped to push a cart out of the mud. The carter paid with a song, and it was a bad song, "
    "but it had eleven verses and shortened the way.",
)

# handbooks and logs
DEVICES = ("pump", "valve", "boiler", "fan", "gate", "sensor", "mixer", "filter", "compressor", "conveyor")
STATES = (
    "started",
    "stopped",
    "reports normal pressure",
    "reports low pressure",
    "was cleaned",
    "was switched to manual",
    "was switched to automatic",
    "waits for material",
    "passed its self test",
    "lost its connection for 2 s",
    "was inspected",
    "reached its nominal speed",
    "changed its interval to 30 s",
    "sent 12 readings",
)
