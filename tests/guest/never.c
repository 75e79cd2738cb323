/* An init that says so and then does nothing for ever: a guest whose agent never answers. */
#include <unistd.h>

int main(void)
{
    static const char text[] = "this guest never answers\n";
    if (write(1, text, sizeof text - 1) < 0) {
        /* No console; it does not matter. */
    }
    for (;;)
        pause();
}
