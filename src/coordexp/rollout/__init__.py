"""From pictures to answers: prompts, seeds, the repeat guard, and the engines behind one interface."""
