"""The actions of `headrace bench`, one file for each group."""
