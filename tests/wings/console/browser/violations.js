(options) => axe.run(document, { ...options, resultTypes: ["violations"] }).then(({ violations }) => violations.flatMap((one) =>
  one.nodes.map((node) => `${one.id}: ${node.target.join(" ")} ${(node.any[0] || node.all[0] || node.none[0] || {}).message}`)))
