// SPDX-License-Identifier: Apache-2.0

package ingress

import (
	"net/http"
	"strings"

	"opensandbox.io/node/forward"
)

// modify makes the answer of a server inside one that cannot reach beyond its sandbox.
func modify(answer *http.Response) error {
	to := routeOf(answer.Request)
	switch {
	case to.port == execdPort:
	case to.way == byPath:
		forward.FitBelow(answer, to.prefix())
	default:
		keepCookiesHere(answer.Header)
	}
	return nil
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
