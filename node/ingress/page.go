// SPDX-License-Identifier: Apache-2.0

package ingress

import (
	"bytes"
	"fmt"
	"html"
	"net/http"
	"strconv"
	"strings"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// refuse answers for a sandbox that does not: a page to people who look at a preview, JSON to programs.
func refuse(w http.ResponseWriter, r *http.Request, err error) {
	if !wantsPage(r) {
		reply.Error(w, r, err)
		return
	}
	fault := reply.Explain(r, err)
	header := w.Header()
	header.Set("Content-Type", "text/html; charset=utf-8")
	header.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'")
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Request-Id", reply.RequestID(r))
	if fault.Code == wire.CodeIngressPortClosed && r.Method == http.MethodGet {
		header.Set("Refresh", "2") // whoever opens a preview too early sees it when it is there
	}
	page := render(fault, reply.RequestID(r))
	header.Set("Content-Length", strconv.Itoa(len(page)))
	w.WriteHeader(fault.Code.Status())
	_, _ = w.Write(page)
}

// wantsPage tells browsers that open a page from everybody else: they name text/html, programs say */* or nothing.
func wantsPage(r *http.Request) bool {
	if r.Method != http.MethodGet && r.Method != http.MethodHead && r.Method != http.MethodPost {
		return false
	}
	for part := range strings.SplitSeq(r.Header.Get("Accept"), ",") {
		kind, parameters, _ := strings.Cut(part, ";")
		if strings.EqualFold(strings.TrimSpace(kind), "text/html") {
			weight, given := strings.CutPrefix(strings.ReplaceAll(strings.ToLower(parameters), " ", ""), "q=")
			return !given || strings.Trim(weight, "0.") != ""
		}
	}
	return false
}

const pageStyle = `:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:38rem;margin:12vh auto;padding:0 1.5rem}` +
	`h1{font-size:1.25rem;font-weight:600;margin:0 0 .75rem}p{margin:0 0 .75rem}small{opacity:.65;overflow-wrap:anywhere}`

func render(fault reply.Fault, requestID string) []byte {
	var page bytes.Buffer
	message, hint := html.EscapeString(fault.Message), html.EscapeString(fault.Hint)
	fmt.Fprintf(&page, "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>%s</title>"+
		"<meta name=\"viewport\" content=\"width=device-width\"><style>%s</style></head>"+
		"<body><h1>%s</h1><p>%s</p><p><small>%d %s · request %s</small></p></body></html>\n",
		message, pageStyle, message, hint, fault.Code.Status(), html.EscapeString(string(fault.Code)), html.EscapeString(requestID))
	return page.Bytes()
}
