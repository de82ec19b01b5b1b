/* Tables and programs that are wider than the screen scroll; with the focus they scroll by the arrow keys, too. */
function reach() {
  for (const box of document.querySelectorAll("article .table-wrapper, article pre")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
addEventListener("load", reach);
addEventListener("resize", reach);
