// The search of a site that is read from the disk. Browsers start no worker from file://, so its script runs in a hidden
// frame, which says "message" to the page and hears it from there as a worker would.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = `<script>
        postMessage = data => frameElement.dispatchEvent(new CustomEvent("answer", { detail: data }))
      </script><script src="${url}"></script>`
      frame.addEventListener("answer", event => {
        this.dispatchEvent(new MessageEvent("message", { data: event.detail }))
      })
      this.started = new Promise(resolve => frame.addEventListener("load", () => resolve(frame.contentWindow)))
      document.body.append(frame)
    }
    async postMessage(data) {
      const inside = await this.started
      inside.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
