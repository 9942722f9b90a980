"""Where parameters live: the stores, and how a rank edits parameters that others share."""
