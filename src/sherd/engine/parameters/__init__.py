"""Where parameters live: what is known of each, the stores, and how a rank edits what others share."""
