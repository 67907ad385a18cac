"""Public training scripts with the fewest lines changed: do they train as they did, with every strategy?"""
