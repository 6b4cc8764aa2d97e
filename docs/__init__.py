"""The pages for people, and the program that prints those of them that the code already says."""
