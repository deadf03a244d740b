"""Where the staircases meet: what is run, how it is stored, and theory beside experiment."""
