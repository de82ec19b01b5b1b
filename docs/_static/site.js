/* Tables and programs that are wider than the screen scroll; with the focus they scroll by the arrow keys, too. */
function reach() {
  for (const box of document.querySelectorAll("article .table-wrapper, article pre")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
/* The theme makes the captions of the navigation headings without a level, which screen readers need. */
function level() {
  for (const caption of document.querySelectorAll('.caption[role="heading"]')) caption.setAttribute("aria-level", "2");
}
addEventListener("load", reach);
addEventListener("load", level);
addEventListener("resize", reach);
