/* Shows the values of the curves nearest to the pointer, in an element with an SVG figure. */
const showValues = (figure, panels) => {
  const svg = figure.querySelector("svg");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  figure.append(tip);
  const cursor = document.createElementNS(svg.namespaceURI, "path");
  cursor.setAttribute("class", "muted-s");
  cursor.setAttribute("stroke", "#59636e");
  cursor.setAttribute("stroke-width", "0.8");
  svg.append(cursor);
  const ratio = (v, [low, high, log]) => log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
  const value = (at, [low, high, log]) => log ? low * Math.pow(high / low, at) : low + at * (high - low);
  const show = (v, percent) => percent ? (100 * v).toFixed(1) + " %" : String(Number(v.toPrecision(5)));
  const nearest = (points, x) => {
    let [low, high] = [0, points.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
  };
  const hide = () => { tip.hidden = true; cursor.removeAttribute("d"); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    const panel = panels.find(({ area: [l, t, w, h] }) => x >= l && x <= l + w && y >= t && y <= t + h);
    if (!panel) return hide();
    const [left, top, width, height] = panel.area;
    const at = value((x - left) / width, panel.x);
    const rows = panel.curves.filter(([, , points]) => points.length > 0).map(([name, color, points]) => [name, color, nearest(points, at)]);
    if (rows.length === 0) return hide();
    const closest = rows.reduce((a, b) => Math.abs(b[2][0] - at) < Math.abs(a[2][0] - at) ? b : a)[2][0];
    cursor.setAttribute("d", `M${left + width * ratio(closest, panel.x)} ${top}v${height}`);
    tip.replaceChildren();
    const line = (text, color) => {
      const row = document.createElement("div");
      if (color !== undefined) {
        const key = document.createElement("i");
        key.className = "k" + color;
        row.append(key);
      }
      row.append(text);
      tip.append(row);
    };
    line(`${panel.x_name}: ${show(closest, false)}`);
    for (const [name, color, [px, y]] of rows) {
      const place = px === closest ? "" : ` (at ${show(px, false)})`;
      line(`${name}: ${show(y, panel.percent)}${place}`, color);
    }
    tip.hidden = false;
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    tip.style.left = Math.max(0, px + 14 + tip.offsetWidth > box.width ? px - 14 - tip.offsetWidth : px + 14) + "px";
    tip.style.top = Math.max(0, py - tip.offsetHeight / 2) + "px";
  });
};
