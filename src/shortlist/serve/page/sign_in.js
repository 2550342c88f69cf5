// The dialog that asks for the token. The browser keeps it in a cookie, which it also sends when it loads pictures.

const byId = (id) => document.getElementById(id);
let asking = null; // while the dialog is open; requests that are refused in the meantime wait for the same answer

// Ask for the token until the server accepts it.
export function signIn() {
  asking ??= ask().finally(() => {
    asking = null;
  });
  return asking;
}

function ask() {
  const dialog = byId("sign-in");
  showProblem("");
  dialog.showModal();
  return new Promise((resolve, reject) => {
    byId("sign-in-form").onsubmit = async (event) => {
      event.preventDefault();
      const problem = await send(byId("token").value.trim());
      showProblem(problem);
      if (problem) return byId("token").select();
      byId("token").value = "";
      dialog.close();
      return resolve();
    };
    dialog.oncancel = () => reject(new Error("This gallery needs a token. Reload the page to enter it."));
  });
}

// Return what is wrong with the token, or an empty text.
async function send(token) {
  try {
    const response = await fetch("/api/sign-in", { method: "POST", headers: { Authorization: `Bearer ${token}` } });
    return response.ok ? "" : (await response.json()).detail;
  } catch (error) {
    return /^[!-~]+$/.test(token) ? "The server does not answer. Is it still running?" : "The token is wrong.";
  }
}

function showProblem(text) {
  byId("sign-in-problem").textContent = text;
  byId("sign-in-problem").hidden = !text;
}
