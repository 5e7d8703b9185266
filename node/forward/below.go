// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"net/http"
	"net/url"
	"strings"
)

// pageSandbox keeps a page of one server from acting as a page of another, or of anything else on this address:
// by path they all share one origin.
const pageSandbox = "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts"

// ofTheOrigin are headers by which a server speaks for its whole origin. By path that is everybody's.
var ofTheOrigin = []string{"Alt-Svc", "Clear-Site-Data", "Service-Worker-Allowed", "Strict-Transport-Security"}

// FitBelow makes the answer of a server that believes to be at the root fit below a prefix.
func FitBelow(answer *http.Response, prefix string) {
	header := answer.Header
	if location := header.Get("Location"); location != "" {
		header.Set("Location", below(prefix, answer.Request.Host, location))
	}
	// Cookies know no ports: without this one sandbox could set another's. One that cannot be parsed is dropped.
	cookies := answer.Cookies()
	header.Del("Set-Cookie")
	for _, cookie := range cookies {
		cookie.Domain = ""
		cookie.Path = prefix + "/" + strings.TrimPrefix(cookie.Path, "/")
		header.Add("Set-Cookie", cookie.String())
	}
	for _, name := range ofTheOrigin {
		header.Del(name)
	}
	// A second policy only narrows the server's own.
	header.Add("Content-Security-Policy", pageSandbox)
}

// below puts a redirect that stays on this server under the prefix; others go where they go.
func below(prefix, host, location string) string {
	u, err := url.Parse(location)
	if err != nil || u.Host != "" && u.Host != host || u.Host == "" && u.Scheme != "" {
		return location
	}
	if u.Host == "" && !strings.HasPrefix(u.Path, "/") {
		return location // relative to the page, which is below already
	}
	rest := "/" + strings.TrimPrefix(u.EscapedPath(), "/")
	if u.RawQuery != "" {
		rest += "?" + u.RawQuery
	}
	if u.Fragment != "" {
		rest += "#" + u.EscapedFragment()
	}
	return prefix + rest
}
