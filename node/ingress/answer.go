// SPDX-License-Identifier: Apache-2.0

package ingress

import (
	"net/http"
	"net/url"
	"strings"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// pageSandbox keeps a page of one sandbox from acting as a page of another, or of anything else on this address:
// by path they all share one origin.
const pageSandbox = "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts"

// ofTheOrigin are headers by which a server speaks for its whole origin. By path that is everybody's.
var ofTheOrigin = []string{"Alt-Svc", "Clear-Site-Data", "Service-Worker-Allowed", "Strict-Transport-Security"}

// modify makes the answer of a server inside one that cannot reach beyond its sandbox.
func modify(answer *http.Response) error {
	to := routeOf(answer.Request)
	if answer.StatusCode > 599 || answer.StatusCode < 200 && answer.StatusCode != http.StatusSwitchingProtocols {
		return reply.Errorf(wire.CodeBackendResponseFailed, "Port %d of the sandbox answered with the status %03d.", to.port, answer.StatusCode)
	}
	if to.body.unread() && answer.StatusCode != http.StatusSwitchingProtocols {
		answer.Header.Set("Connection", "close")
	}
	switch {
	case to.port == execdPort:
	case to.way == byPath:
		fitBelow(answer, to)
	default:
		keepCookiesHere(answer.Header)
	}
	return nil
}

// fitBelow makes the answer of a server that believes to be at the root fit below the route's prefix.
func fitBelow(answer *http.Response, to route) {
	header := answer.Header
	if location := header.Get("Location"); location != "" {
		header.Set("Location", below(to, answer.Request.Host, location))
	}
	// Cookies know no ports: without this one sandbox could set another's. One that cannot be parsed is dropped.
	cookies := answer.Cookies()
	header.Del("Set-Cookie")
	for _, cookie := range cookies {
		cookie.Domain = ""
		cookie.Path = to.prefix() + "/" + strings.TrimPrefix(cookie.Path, "/")
		header.Add("Set-Cookie", cookie.String())
	}
	for _, name := range ofTheOrigin {
		header.Del(name)
	}
	// A second policy only narrows the server's own.
	header.Add("Content-Security-Policy", pageSandbox)
}

// keepCookiesHere takes the Domain out of cookies: they stay with the one host that set them, and no sandbox sets one
// for all names below localhost. The rest stays as it is written, also attributes that are not known here.
func keepCookiesHere(header http.Header) {
	cookies := header["Set-Cookie"]
	for i, cookie := range cookies {
		parts := strings.Split(cookie, ";")
		kept := parts[:1]
		for _, part := range parts[1:] {
			name, _, _ := strings.Cut(part, "=")
			if !strings.EqualFold(strings.TrimSpace(name), "domain") {
				kept = append(kept, part)
			}
		}
		cookies[i] = strings.Join(kept, ";")
	}
}

// below puts a redirect that stays on this server under the route's prefix; others go where they go.
func below(to route, host, location string) string {
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
	return to.prefix() + rest
}
