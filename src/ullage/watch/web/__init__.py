"""The live page of `ullage watch --web`: what was seen, kept within bounds, as JSON and as a page.

`feed.Feed` takes Sights, `app.create_app(feed)` shows them, `server.serving` opens the port.
"""
