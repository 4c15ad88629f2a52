() => [...document.querySelectorAll("button, input[type=submit], input[type=button], [role=button]")].map((b) => {
  const form = b.form;
  const data = Object.entries(b.dataset).filter(([name]) => name !== "confirm").map(([name, value]) => [name, value]);
  return {
    text: (b.getAttribute("aria-label") || b.textContent).trim(), submits: !!form && b.type !== "button", id: b.id, data,
    method: form ? (b.getAttribute("formmethod") || form.method).toUpperCase() : "",
    path: form ? new URL(b.getAttribute("formaction") || form.action, location.href).pathname : "",
    name: b.name ? `${b.name}=${b.value}` : "",
    fields: form ? [...new FormData(form)].filter(([, value]) => typeof value === "string") : [],
  };
})
