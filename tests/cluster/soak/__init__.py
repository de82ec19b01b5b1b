"""A cluster that repairs itself while its parts fail for minutes; ``__main__.py`` says what it does."""
