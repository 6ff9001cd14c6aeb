def moved(rows):
    return []
