"""Files that attack their judge, one way each; every call of theirs gives a wrong result."""
