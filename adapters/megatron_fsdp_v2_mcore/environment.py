def v2_problems():
    return []
