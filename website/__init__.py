"""What the documentation's site has beside the pages of ``docs``: ``make docs`` builds it with mkdocs.

``hooks`` makes links to files outside ``docs`` work, and adds generated pages; ``reference`` generates them.
"""
