"""The sections of the settings: one file for each subject."""
