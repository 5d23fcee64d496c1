// Texts of other processes, before they are shown to somebody.
#pragma once

#include <string>
#include <utility>

namespace switchyard {

/// The text without control characters but line ends: they could steer the terminal of whoever reads an error.
inline std::string printable(std::string text) {
    for (char& c : text)
        if ((static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7F) c = '?';
    return text;
}

}  // namespace switchyard
