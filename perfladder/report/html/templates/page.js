(() => {
  "use strict";
  const told = document.getElementById("told");
  const tell = (text) => { told.textContent = text; };

  /* Tables: heads become buttons that sort, long ones a search and "show all". */
  const printed = 60;
  const keyOf = (row, column, isNumber) => {
    const cell = row.cells[column];
    if (!isNumber) return cell.textContent.trim().toLowerCase();
    return "value" in cell.dataset ? Number(cell.dataset.value) : null;
  };
  const sortBy = (table, head, column, isNumber) => {
    const before = head.getAttribute("aria-sort");
    const isUp = before ? before === "descending" : !isNumber;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
    const body = table.tBodies[0];
    const keyed = Array.from(body.rows, (row) => [keyOf(row, column, isNumber), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = isNumber ? a - b : a.localeCompare(b);
      return isUp ? order : -order;
    });
    const shown = Number(table.closest(".table").dataset.shown);
    keyed.forEach(([, row], place) => {
      row.classList.toggle("more", place >= shown);
      row.classList.toggle("far", place >= printed);
    });
    body.append(...keyed.map(([, row]) => row));
    tell(`Sorted by ${head.textContent.trim()}, ${isUp ? "ascending" : "descending"}.`);
  };
  const addButtons = (table) => {
    Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      const isNumber = head.classList.contains("number");
      button.addEventListener("click", () => sortBy(table, head, column, isNumber));
    });
  };
  const addShowAll = (box, table) => {
    const button = document.createElement("button");
    button.type = "button";
    const rows = table.tBodies[0].rows.length;
    const name = () => {
      const isCut = table.classList.contains("cut");
      button.textContent = isCut ? `Show all ${rows} rows` : `Show ${box.dataset.shown} rows`;
      button.setAttribute("aria-expanded", String(!isCut));
    };
    button.addEventListener("click", () => { table.classList.toggle("cut"); name(); });
    name();
    box.append(button);
    Array.from(table.tBodies[0].rows).forEach((row, place) => row.classList.toggle("far", place >= printed));
    if (rows > printed) table.caption.dataset.print = `; the first ${printed} of ${rows} rows`;
  };
  const addSearch = (box, table) => {
    const tools = document.createElement("div");
    tools.className = "tools";
    const label = document.createElement("label");
    const input = document.createElement("input");
    input.type = "search";
    label.append("Search ", input);
    const count = document.createElement("span");
    count.className = "count";
    tools.append(label, count);
    box.prepend(tools);
    const wasCut = table.classList.contains("cut");
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      let found = 0;
      for (const row of table.tBodies[0].rows) {
        const isIn = row.textContent.toLowerCase().includes(wanted);
        row.classList.toggle("out", !isIn);
        found += isIn;
      }
      table.classList.toggle("cut", wasCut && wanted === "");
      count.textContent = wanted ? `${found} of ${table.tBodies[0].rows.length} rows` : "";
      tell(count.textContent);
    });
  };
  for (const box of document.querySelectorAll(".table")) {
    const table = box.querySelector("table");
    if (table.querySelector("td.empty")) continue;
    addButtons(table);
    if (table.classList.contains("cut")) addShowAll(box, table);
    if ("search" in box.dataset) addSearch(box, table);
  }

  /* Commands: a copy button. Where the clipboard is refused, as in a sandbox, the text is selected. */
  for (const command of document.querySelectorAll(".command")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const code = command.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
        tell("Copied.");
      } catch {
        const range = document.createRange();
        range.selectNodeContents(code);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        tell("The command is selected.");
      }
    });
    command.append(button);
  }

  /* Navigation: which section is on the screen. */
  const links = new Map(Array.from(document.querySelectorAll("nav a"), (link) => [link.hash.slice(1), link]));
  const here = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) { link.classList.remove("here"); link.removeAttribute("aria-current"); }
      const link = links.get(entry.target.id);
      link.classList.add("here");
      link.setAttribute("aria-current", "location");
    }
  }, { rootMargin: "-10% 0px -80% 0px" });
  for (const section of document.querySelectorAll("main > section[id]")) here.observe(section);

  /* Printing: long names in full. */
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = Array.from(document.querySelectorAll("details.long:not([open])"));
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of opened) details.open = false; });

  /* Plots: unpacked after the first paint, drawn when they come near the window, and all before printing. */
  const figures = Array.from(document.querySelectorAll("[data-plot]"));
  const root = document.documentElement;
  const packed = document.getElementById("plot-library");
  if (!packed) {
    for (const figure of figures) figure.classList.add("failed");
    return;
  }
  const unpack = async (element) => {
    const text = atob(element.textContent);
    const bytes = new Uint8Array(text.length);
    for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  const configFor = (view) => {
    const hasAxes = view.traces.some((trace) => trace.type !== "icicle");
    return {
      displaylogo: false,
      displayModeBar: "hover",
      responsive: true,
      showSendToCloud: false,
      modeBarButtons: hasAxes ? [["zoom2d", "pan2d", "resetScale2d"], ["toImage"]] : [["toImage"]],
    };
  };
  const isPlain = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const merged = (base, more) => {
    const result = { ...base };
    for (const [name, value] of Object.entries(more)) {
      result[name] = isPlain(value) && isPlain(base[name]) ? merged(base[name], value) : value;
    }
    return result;
  };
  const plain = (text) => text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shorter = (text, length) => {
    const whole = plain(text);
    if (whole.length <= length) return text;
    return escaped(whole.slice(0, length / 2 - 1) + "…" + whole.slice(-length / 2));
  };
  const layoutFor = (view, width, height) => {
    const axis = { automargin: true, zeroline: false, ticks: "", gridcolor: "#ccc" };
    const isNarrow = width < 560;
    const base = {
      autosize: true,
      height,
      margin: { l: 12, r: isNarrow ? 14 : 40, t: 10, b: 46 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: isNarrow ? 11 : 12.5 },
      hoverlabel: { align: "left" },
      legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", traceorder: "normal" },
      uniformtext: { mode: "hide", minsize: 10 },
      xaxis: axis,
      yaxis: axis,
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    };
    const layout = merged(base, view.layout);
    if (layout.yaxis.type === "category") {
      const names = [...new Set(view.traces.flatMap((trace) => trace.y || []))];
      layout.yaxis = { ...layout.yaxis, tickmode: "array", tickvals: names };
      layout.yaxis.ticktext = names.map((name) => shorter(name, isNarrow ? 16 : 44) + "  ");
      layout.yaxis.showgrid = false;
    }
    return layout;
  };
  const fitForPrint = (target) => {
    for (const svg of target.querySelectorAll(".main-svg")) {
      const [width, height] = [svg.getAttribute("width"), svg.getAttribute("height")];
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      target.style.setProperty("--ratio", String(width / height));
    }
  };
  const start = (plots) => {
    let numDrawn = 0;
    let numFailed = 0;
    const waiting = new Set(figures.keys());
    const draw = (index, chosen) => {
      const figure = figures[index];
      const target = figure.querySelector(".plot");
      const view = plots[index].views[chosen];
      const height = plots[index].height;
      return Plotly.react(target, view.traces, layoutFor(view, target.clientWidth, height), configFor(view));
    };
    /* One after the other: a plot that is replaced while it is still being drawn can keep the browser busy for good. */
    const queue = new Map();
    const enqueue = (index, chosen) => {
      const drawn = (queue.get(index) || Promise.resolve()).then(() => draw(index, chosen)).then(() => {
        figures[index].dataset.view = String(chosen);
      });
      queue.set(index, drawn.catch((error) => failed(index, error)));
      return drawn;
    };
    const failed = (index, error) => {
      figures[index].classList.add("failed");
      console.error("plot", index, error);
      root.dataset.plotsFailed = String(++numFailed);
    };
    const first = (index) => {
      if (!waiting.delete(index)) return;
      near.unobserve(figures[index]);
      enqueue(index, 0).then(() => {
        const target = figures[index].querySelector(".plot");
        target.style.minHeight = "0";
        fitForPrint(target);
        target.on("plotly_afterplot", () => fitForPrint(target));
        root.dataset.plotsDrawn = String(++numDrawn);
        if (numDrawn === figures.length) root.dataset.plotsMs = String(Math.round(performance.now()));
      }, () => {});
    };
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) first(figures.indexOf(entry.target));
    }, { rootMargin: "300px" });
    figures.forEach((figure, index) => {
      near.observe(figure);
      const buttons = figure.querySelectorAll(".views button");
      for (const button of buttons) {
        button.addEventListener("click", () => {
          for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
          first(index);
          enqueue(index, Number(button.dataset.view)).catch(() => {});
        });
      }
    });
    /* The rest one by one while nothing else is to do, so that a printed page has them all. */
    const idle = (next) => {
      if (window.requestIdleCallback) requestIdleCallback(next, { timeout: 300 });
      else setTimeout(next, 50);
    };
    const rest = () => {
      const [index] = waiting;
      if (index === undefined) return;
      first(index);
      idle(rest);
    };
    idle(rest);
    addEventListener("beforeprint", () => { for (const index of [...waiting]) first(index); });
  };
  const load = async () => {
    try {
      const [library, data] = await Promise.all([unpack(packed), unpack(document.getElementById("plot-data"))]);
      const script = document.createElement("script");
      script.textContent = library;
      document.head.append(script);
      start(JSON.parse(data));
    } catch (error) {
      console.error("plots", error);
      root.dataset.plotsFailed = String(figures.length);
      for (const figure of figures) figure.classList.add("failed");
    }
  };
  /* After the first paint. A page that is not shown paints nothing: it starts all the same. */
  let isStarted = false;
  const begin = () => {
    if (!isStarted) load();
    isStarted = true;
  };
  requestAnimationFrame(() => setTimeout(begin));
  setTimeout(begin, 1000);
})();
