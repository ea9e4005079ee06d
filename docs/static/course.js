// What the theme leaves open for who reads by keyboard or by ear; and an output without a word is no box.
addEventListener("DOMContentLoaded", () => {
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Contents");
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.setAttribute("aria-level", "2");
  for (const output of document.querySelectorAll(".output.text_plain")) output.textContent.trim() || output.remove();
  const reach = () => { // what scrolls sideways takes the arrow keys
    for (const part of document.querySelectorAll("article :is(pre, .output, .table-wrapper, p:has(img))"))
      if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  };
  addEventListener("resize", reach);
  document.addEventListener("toggle", reach, true); // a fold opens
  reach();
});
