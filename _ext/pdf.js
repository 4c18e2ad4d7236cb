// Paper cannot be unfolded, and solutions should not be in sight right below exercises, so move the
// solutions to the end. Chromium records an element's place only if a link on its page leads to it.
{
  const section = document.createElement("section");
  section.id = "solutions";
  section.innerHTML = "<h2>Solutions</h2>";
  let exercise;
  for (const box of document.querySelectorAll(".bd-article :is(.exercise, .solution)")) {
    const title = box.querySelector(".admonition-title");
    if (box.matches(".exercise")) exercise = box;
    else {
      const link = Object.assign(document.createElement("a"), { href: `#${exercise.id}` });
      link.textContent = exercise.querySelector(".admonition-title").textContent.trim();
      title.replaceChildren("Solution of ", link);
      section.append(box);
    }
  }
  if (exercise) document.querySelector(".bd-article > section").append(section);
  const places = document.createElement("nav");
  places.hidden = true;
  for (const { id } of document.querySelectorAll(".bd-article :not(svg *)[id]"))
    places.append(Object.assign(document.createElement("a"), { href: `#${id}` }));
  document.body.append(places);
}
