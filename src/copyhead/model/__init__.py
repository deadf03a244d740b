"""Ground floor: task, network, prior and energy, before anybody solves or samples anything."""
