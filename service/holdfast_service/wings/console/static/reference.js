// The reference of the API: Swagger UI shows our own description, and sends no other request.
"use strict";

document.documentElement.classList.toggle("dark-mode", matchMedia("(prefers-color-scheme: dark)").matches);
SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  docExpansion: "list",
  showExtensions: true,
  supportedSubmitMethods: [],
  validatorUrl: null,
});
