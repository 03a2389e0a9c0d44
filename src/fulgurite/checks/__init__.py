"""Parts of ``fulgurite check-data``: what it reads of the images, what it makes of that, and how it shows it."""
