"""Back-propagation that is not linear in what it passes back: equal to one device's, or refused by name."""
